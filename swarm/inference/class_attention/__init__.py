"""Models whose class computes attention itself, from a mask or a batch that says what each row sees."""
