"""Figures that papers print, beside those of this version's models."""
