"""Who is missing, and where everybody stands: asked through a side store, when something fails."""
