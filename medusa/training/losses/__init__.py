"""What every kind of training minimises: targets, objectives, and a loss that never holds all logits."""
