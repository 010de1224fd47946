import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Consumer groups, each of which gets every message of a topic that is there already. Groups may take seconds to find
 * their partitions, so the clock starts when the last group has its first message, and only what is handled after that
 * counts. Where that is less than half, the clock starts with the first message of all.
 */
final class Drain {
    private static final long MOST_SECONDS = 120;

    private final Peer peer;
    private final String topic;
    private final int groups, messages;
    private final AtomicLong handled = new AtomicLong();
    private final CountDownLatch begun, done;
    private final AtomicLong firstAt = new AtomicLong();
    private volatile long lastAt;

    Drain(Peer peer, Command command) {
        this.peer = peer;
        topic = command.text("topic");
        groups = command.number("groups");
        messages = command.number("messages");
        begun = new CountDownLatch(groups);
        done = new CountDownLatch(groups);
    }

    private final class Group {
        private final Seen seen = new Seen();
        private final AtomicBoolean hasBegun = new AtomicBoolean(), isDone = new AtomicBoolean();

        void handle(long number) {
            if (!hasBegun.getAndSet(true)) {
                firstAt.compareAndSet(0, System.nanoTime());
                begun.countDown();
            }
            seen.add(number);
            handled.incrementAndGet();
            if (seen.all() >= messages && seen.different() >= messages && !isDone.getAndSet(true)) {
                lastAt = System.nanoTime();
                done.countDown();
            }
        }
    }

    Map<String, Number> run() throws Exception {
        List<Group> all = new ArrayList<>();
        List<Future<AutoCloseable>> starting = new ArrayList<>();
        ExecutorService starters = Executors.newFixedThreadPool(groups);
        for (int i = 0; i < groups; i++) {
            Group group = new Group();
            String name = topic + "-" + groups + "-" + i;
            all.add(group);
            starting.add(starters.submit(() -> peer.consume(topic, name, group::handle)));
        }
        begun.await(MOST_SECONDS, TimeUnit.SECONDS);
        long since = System.nanoTime(), before = handled.get(), total = (long) groups * messages;
        boolean isWhole = done.await(MOST_SECONDS, TimeUnit.SECONDS);
        if (2 * before > total) {
            since = firstAt.get();
            before = 0;
        }
        long counted = handled.get() - before, until = isWhole ? lastAt : System.nanoTime();
        List<Callable<Void>> closing = new ArrayList<>();
        for (Future<AutoCloseable> consumer : starting) {
            closing.add(() -> {
                consumer.get().close();
                return null;
            });
        }
        for (Future<Void> closed : starters.invokeAll(closing)) closed.get();
        starters.shutdown();
        Map<String, Number> figures = new LinkedHashMap<>();
        figures.put("per_second", counted / ((until - since) / 1e9));
        figures.put("counted", counted);
        figures.put("lost", all.stream().mapToLong(group -> messages - group.seen.different()).sum());
        figures.put("doubled", all.stream().mapToLong(group -> group.seen.doubled()).sum());
        return figures;
    }
}
