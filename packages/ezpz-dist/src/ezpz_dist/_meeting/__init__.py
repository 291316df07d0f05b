"""How the ranks find each other, and whether they agree."""
