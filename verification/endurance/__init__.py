"""Hours of the demo's load with a fault every minute: what grows, and what must not."""
