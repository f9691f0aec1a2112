"""The tasks: `choose` chooses the texts and cases to compare, `answer` gets PyTorch's answers."""
