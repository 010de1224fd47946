"""A consumer over Apache Kafka: the same handlers and inbox as with a queue server.

`loop` runs it: records come in (`feed`), each partition's are kept in a `window` until they are done, handlers run
(`handling`), and what became of them is committed (`settling`), with what `failed` on its way to another topic. Who has
which partitions is decided by Kafka's group (`membership`), or by one owner of all (`ownership`).
"""
