"""Evidence of a bundle on this machine: accuracy, times, memory and energy, measured on a file of texts."""
