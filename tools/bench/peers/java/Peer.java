import java.util.Map;

/** A message system as the driver uses it. Each message carries its number in its first eight bytes. */
interface Peer {
    void createTopic(String topic) throws Exception;

    /** What `callers` threads share to send transactions to a topic. */
    Sender sender(String topic, int callers) throws Exception;

    /** Stores messages without transactions, with the numbers 0 to `messages` - 1. */
    void publish(String topic, int messages) throws Exception;

    /** By partition, the offset behind the last message that a consumer can get now. */
    Map<Integer, Long> ends(String topic) throws Exception;

    /** Calls `visit` with every message that a consumer can get, from an offset of each partition on. */
    void read(String topic, Map<Integer, Long> from, Map<Integer, Long> until, Visit visit) throws Exception;

    /** Starts a consumer group at the first message; `handle` may be called by several threads. */
    AutoCloseable consume(String topic, String group, Handler handle) throws Exception;

    interface Sender extends AutoCloseable {
        /** Stores a half, calls `commits`, and commits; returns when the caller may go on. */
        void transaction(byte[] body, Runnable commits) throws Exception;

        @Override
        void close();
    }

    interface Visit {
        void message(int partition, long offset, long number);
    }

    interface Handler {
        void message(long number);
    }
}
