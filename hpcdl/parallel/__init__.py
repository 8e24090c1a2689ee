"""What a rank holds of a model that is cut: units, ZeRO's stages, layers gathered one by one, a pipeline's stage."""
