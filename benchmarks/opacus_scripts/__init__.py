"""Three training scripts in Opacus's style, run on Opacus and, with its name in the imports replaced, on dpvision."""
