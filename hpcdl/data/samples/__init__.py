"""Data files of samples that are decoded one by one: images in folders; images or arrays in WebDataset's tars."""
