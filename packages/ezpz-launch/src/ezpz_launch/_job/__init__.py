"""The life of a job: submitting, chains, the queue, and what people ask of jobs."""
