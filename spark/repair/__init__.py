"""Repairs of an audit's findings: a plan that a person reviews, and carrying out exactly that plan."""
