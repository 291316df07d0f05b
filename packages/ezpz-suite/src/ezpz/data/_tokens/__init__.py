"""Text in files, tokens in one file, blocks of tokens in a training."""
