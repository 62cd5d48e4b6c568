"""Link probe: how fast a link is, measured; what ``commsched probe`` and the benches share."""
