"""Replicas of the server as a Ray Serve application.

    client -> Ray's proxy -> Ingress -> PrefixRouter -> Replica, the HTTP server without a port
                                                     -> Replica

Needs the `ray` extra; nothing outside this package imports it. `affinity` and `prompt_text` decide
where a request goes and know nothing of Ray; `router` is the one place that meets Ray's router.
"""
