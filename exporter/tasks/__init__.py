"""Says what is compared of each task: `choose` chooses texts and cases, `answer` asks PyTorch."""
