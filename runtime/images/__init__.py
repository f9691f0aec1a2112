"""Pictures from text: what denoises a sample by what a model predicts, without the model."""
