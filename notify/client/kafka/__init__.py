"""A consumer over Apache Kafka: the same handlers and inbox as with a queue server.

`loop` runs it. `feed` fetches records into the `window` of their partition, where they stay until they are done.
`handling` runs the handlers, and `settling` commits the progress, together with failed messages that go to another
topic (`retries`). Partitions are assigned by Kafka's group (`membership`), or all belong to one owner (`ownership`).
"""
