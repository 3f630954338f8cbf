"""What a training run is told."""
