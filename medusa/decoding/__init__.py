"""From a request to tokens: the loop, the step with fixed shapes, and how steps are run."""
