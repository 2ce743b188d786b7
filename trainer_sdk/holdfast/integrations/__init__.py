"""Holdfast in training frameworks: a module for each, which needs that framework.

They use only what the framework documents, and the public API of Holdfast.
"""
