"""What a release claims, how it is written, and how anyone can verify it. Verification needs no torch."""
