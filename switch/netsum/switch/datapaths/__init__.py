"""Adapters: one for each kind of datapath, all behind :class:`netsum.switch.datapaths.base.Datapath`."""
