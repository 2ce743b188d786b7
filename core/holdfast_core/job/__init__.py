"""The `MoETrainingJob`: its document, the rules between its fields, and its status."""
