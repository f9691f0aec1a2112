"""What is compared of each task: `choose` says which texts and cases, `answer` asks PyTorch."""
