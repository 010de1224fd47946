import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.IntStream;

/**
 * Callers store a half and its outcome, again and again; with a `rate` at fixed times, and with a consumer beside them.
 * Afterwards every acknowledged transaction is looked for among all messages that a consumer can get.
 */
final class Transactions {
    private static final long SECOND = 1_000_000_000L;
    private static final long SETTLE_SECONDS = 90, HANDLE_SECONDS = 30;
    private static final long NO_NUMBER = 0; // the consumer's first message, sent before the callers start

    private final Peer peer;
    private final String topic;
    private final int callers;
    private final double seconds, warmup, rate;
    private final AtomicLong numbers = new AtomicLong(NO_NUMBER + 1);
    private final Set<Long> failed = ConcurrentHashMap.newKeySet();
    private final Map<String, Integer> reasons = new ConcurrentHashMap<>();
    private final long[] commitsAt;
    private final long[] handledAt;
    private long begin, measured, end;

    Transactions(Peer peer, Command command) {
        this.peer = peer;
        topic = command.text("topic");
        callers = command.number("callers");
        seconds = command.real("seconds");
        warmup = command.real("warmup");
        rate = command.name.equals("paced") ? command.real("rate") : 0;
        int most = rate > 0 ? (int) (rate * (seconds + warmup + 5)) : 0;
        commitsAt = new long[most];
        handledAt = new long[most];
    }

    Map<String, Number> run() throws Exception {
        peer.createTopic(topic);
        Map<String, Number> figures = new LinkedHashMap<>();
        AutoCloseable consumer = rate > 0 ? startConsumer() : null;
        try (Peer.Sender sender = peer.sender(topic, callers)) { // open to the end, to answer checks
            measure(sender, figures);
            verify(figures);
        }
        if (consumer != null) {
            addEndToEnd(figures);
            consumer.close();
        }
        reasons.forEach((reason, times) -> System.err.println(times + " times " + reason));
        return figures;
    }

    private void measure(Peer.Sender sender, Map<String, Number> figures) throws Exception {
        begin = System.nanoTime() + SECOND / 10;
        measured = begin + (long) (warmup * SECOND);
        end = measured + (long) (seconds * SECOND);
        List<Caller> threads = new ArrayList<>();
        for (int i = 0; i < callers; i++) threads.add(new Caller(sender, i));
        threads.forEach(Thread::start);
        sleepUntil(measured);
        long firstAt = System.nanoTime();
        Map<Integer, Long> first = peer.ends(topic);
        for (Caller thread : threads) thread.join();
        Map<Integer, Long> last = peer.ends(topic);
        double elapsed = (System.nanoTime() - firstAt) / (double) SECOND;
        long[] sorted =
            threads.stream().flatMapToLong(each -> Arrays.stream(each.latencies, 0, each.count)).sorted().toArray();
        figures.put("recorded_per_second", threads.stream().mapToLong(each -> each.recorded).sum() / seconds);
        figures.put("visible_per_second", count(first, last) / elapsed);
        figures.put("p50_ms", Figures.milliseconds(sorted, 0.5));
        figures.put("p99_ms", Figures.milliseconds(sorted, 0.99));
    }

    /** A message before all others shows that the consumer has its partitions. */
    private AutoCloseable startConsumer() throws Exception {
        AutoCloseable consumer = peer.consume(topic, topic + "-group", number -> {
            if (number < handledAt.length && handledAt[(int) number] == 0) handledAt[(int) number] = System.nanoTime();
        });
        peer.publish(topic, 1);
        for (long tries = 0; handledAt[(int) NO_NUMBER] == 0; tries++) {
            if (tries > 600) throw new IllegalStateException("the consumer got no message within 30 s");
            Thread.sleep(50); // the pause between two looks
        }
        return consumer;
    }

    private final class Caller extends Thread {
        private final Peer.Sender sender;
        private final int place;
        private long[] latencies = new long[1 << 12];
        private int count, recorded;

        Caller(Peer.Sender sender, int place) {
            this.sender = sender;
            this.place = place;
        }

        @Override
        public void run() {
            double interval = rate > 0 ? callers * SECOND / rate : 0;
            double next = begin + interval * place / callers;
            sleepUntil(begin);
            while (true) {
                if (interval > 0) {
                    sleepUntil((long) next);
                    next += interval;
                }
                long started = System.nanoTime();
                if (started >= end) return;
                long number = numbers.getAndIncrement();
                try {
                    sender.transaction(Figures.body(number), () -> noteCommit(number));
                } catch (Exception error) {
                    failed.add(number);
                    reasons.merge(String.valueOf(error), 1, Integer::sum);
                    continue;
                }
                long now = System.nanoTime();
                if (now < measured || now > end) continue;
                recorded++;
                if (started >= measured) {
                    if (count == latencies.length) latencies = Arrays.copyOf(latencies, 2 * count);
                    latencies[count++] = now - started;
                }
            }
        }
    }

    private void noteCommit(long number) {
        if (number < commitsAt.length) commitsAt[(int) number] = System.nanoTime();
    }

    private static void sleepUntil(long time) {
        for (long now = System.nanoTime(); now < time; now = System.nanoTime()) LockSupport.parkNanos(time - now);
    }

    /** How many messages lie between two ends; a transaction may take more than one offset, so they are read. */
    private long count(Map<Integer, Long> first, Map<Integer, Long> last) throws Exception {
        AtomicLong between = new AtomicLong();
        peer.read(topic, first, last, (partition, offset, number) -> between.incrementAndGet());
        return between.get();
    }

    /** A committed message may become visible late, but once it must. */
    private void verify(Map<String, Number> figures) throws Exception {
        long sent = numbers.get() - 1;
        Seen seen = new Seen();
        Map<Integer, Long> from = new HashMap<>();
        long since = System.nanoTime(), lookedAt, missing;
        do {
            lookedAt = System.nanoTime();
            Map<Integer, Long> until = peer.ends(topic);
            peer.read(topic, from, until, (partition, offset, number) -> {
                if (number != NO_NUMBER) seen.add(number);
            });
            from = until;
            missing = missing(seen, sent);
            if (missing > 0) Thread.sleep(200); // the pause between two looks
        } while (missing > 0 && System.nanoTime() - since < SETTLE_SECONDS * SECOND);
        figures.put("sent", sent - failed.size());
        figures.put("failed", failed.size());
        figures.put("lost", missing);
        figures.put("doubled", seen.doubled());
        double settled = (lookedAt - since) / (double) SECOND;
        figures.put("settle_seconds", settled);
        figures.put("settled_per_second", (sent - failed.size()) / (warmup + seconds + settled));
    }

    private long missing(Seen seen, long sent) {
        long missing = 0;
        for (long number = 1; number <= sent; number++) if (!seen.has(number) && !failed.contains(number)) missing++;
        return missing;
    }

    /** From the moment at which a caller commits to the handler, of transactions after the warm-up. */
    private void addEndToEnd(Map<String, Number> figures) throws InterruptedException {
        int[] counted = IntStream.range(1, (int) Math.min(numbers.get(), commitsAt.length))
            .filter(number -> commitsAt[number] >= measured && !failed.contains((long) number)).toArray();
        long unhandled = counted.length;
        for (int looks = 0; unhandled > 0 && looks < HANDLE_SECONDS * 10; looks++) {
            unhandled = IntStream.of(counted).filter(number -> handledAt[number] == 0).count();
            if (unhandled > 0) Thread.sleep(100); // the pause between two looks
        }
        long[] sorted = IntStream.of(counted).filter(number -> handledAt[number] != 0)
            .mapToLong(number -> handledAt[number] - commitsAt[number]).sorted().toArray();
        figures.put("end_to_end_p50_ms", Figures.milliseconds(sorted, 0.5));
        figures.put("end_to_end_p99_ms", Figures.milliseconds(sorted, 0.99));
        figures.put("lost", figures.get("lost").longValue() + unhandled);
    }
}
