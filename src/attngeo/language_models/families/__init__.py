"""The supported families: decoders of text, encoders of text, of speech, and vision transformers."""
