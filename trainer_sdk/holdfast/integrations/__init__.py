"""Holdfast in training frameworks: one module for each, which needs that framework.

The modules use only documented features of the framework, and the public API of Holdfast.
"""
