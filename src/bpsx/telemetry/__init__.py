"""What a job tells about itself: timelines, rates, metrics."""
