"""The supported families: decoders of text, encoders of text, and vision transformers."""
