"""Tests of what patches share of DeepSpeed's objects."""
