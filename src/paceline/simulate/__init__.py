"""The pacer on modelled machines: how it fares where no measurement reaches, at hundreds of users and long contexts.

A device is a formula for the time of a step, a request is a curve of acceptance; both are drawn from a seed, and the
pacer sees of them what an engine would see.
"""
