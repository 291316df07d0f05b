"""What a training loop needs: times, rates, memory, the gradient's norm, alarms, profiles."""
