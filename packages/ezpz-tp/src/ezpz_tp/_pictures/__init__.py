"""Pictures of which rank is where: in a terminal and as SVG."""
