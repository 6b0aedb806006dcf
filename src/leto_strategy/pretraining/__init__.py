"""Pretraining of small language models: the Hydra application behind `leto train`.

Network, LightningModule and data are those of any Lightning project and know nothing of Leto: which strategy trains is
a choice of the configuration.
"""
