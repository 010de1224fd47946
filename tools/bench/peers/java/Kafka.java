import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Apache Kafka: a transaction of one record. A transactional producer has one transaction at a time, so many callers
 * share a pool of them, as the threads of a service would. Argument: the bootstrap servers.
 */
public final class Kafka implements Peer {
    private static final int PARTITIONS = 8, PRODUCERS = 128, MOST = 2000;
    private static final Duration WAIT = Duration.ofMillis(200);
    private static final Duration CREATED_WITHIN = Duration.ofSeconds(30);

    private final String servers;
    private final Admin admin;
    private final KafkaConsumer<byte[], byte[]> reader;

    public Kafka(String servers) {
        this.servers = servers;
        admin = Admin.create(Map.of("bootstrap.servers", servers));
        reader = consumer(null);
    }

    @Override
    public void createTopic(String topic) throws Exception {
        admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1))).all().get();
        // The controller has it; the broker hears of it a moment later, and knows no such topic until then.
        long deadline = System.nanoTime() + CREATED_WITHIN.toNanos();
        while (true) {
            try {
                ends(topic); // answered once every partition has its leader
                return;
            } catch (ExecutionException error) {
                boolean isUnknown = error.getCause() instanceof UnknownTopicOrPartitionException;
                if (!isUnknown || System.nanoTime() > deadline) throw error;
                Thread.sleep(WAIT.toMillis());
            }
        }
    }

    private KafkaProducer<byte[], byte[]> producer(Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(more);
        settings.put("bootstrap.servers", servers);
        settings.put("acks", "all");
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    private KafkaConsumer<byte[], byte[]> consumer(String group) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", servers);
        settings.put("isolation.level", "read_committed");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("max.poll.records", MOST);
        if (group != null) settings.put("group.id", group);
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    @Override
    public Sender sender(String topic, int callers) throws Exception {
        int count = Math.min(callers, PRODUCERS);
        BlockingQueue<KafkaProducer<byte[], byte[]>> idle = new ArrayBlockingQueue<>(count);
        List<Thread> starting = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            String id = topic + "-" + i;
            Thread thread = new Thread(() -> {
                KafkaProducer<byte[], byte[]> producer = producer(Map.of("transactional.id", id, "linger.ms", 0));
                producer.initTransactions();
                idle.add(producer);
            });
            starting.add(thread);
            thread.start();
        }
        for (Thread thread : starting) thread.join();
        if (idle.size() < count) throw new IllegalStateException((count - idle.size()) + " producers did not start");
        return new Sender() {
            @Override
            public void transaction(byte[] body, Runnable commits) throws Exception {
                KafkaProducer<byte[], byte[]> producer = idle.take();
                try {
                    producer.beginTransaction();
                    int partition = (int) (Figures.number(body) % PARTITIONS);
                    producer.send(new ProducerRecord<>(topic, partition, null, body));
                    producer.flush(); // the half is on the disk before the caller commits
                    commits.run();
                    producer.commitTransaction();
                } finally {
                    idle.add(producer);
                }
            }

            @Override
            public void close() {
                idle.forEach(KafkaProducer::close);
            }
        };
    }

    @Override
    public void publish(String topic, int messages) throws Exception {
        // An idempotent producer did not send the first batch of a new topic for 120 s in two of ten runs.
        Map<String, Object> settings = Map.of(
            "linger.ms", 5, "batch.size", 1 << 20, "enable.idempotence", false, "delivery.timeout.ms", 40_000);
        try (KafkaProducer<byte[], byte[]> producer = producer(settings)) {
            List<Future<?>> sent = new ArrayList<>();
            for (int n = 0; n < messages; n++) {
                sent.add(producer.send(new ProducerRecord<>(topic, n % PARTITIONS, null, Figures.body(n))));
            }
            producer.flush();
            for (Future<?> each : sent) each.get();
        }
    }

    @Override
    public Map<Integer, Long> ends(String topic) throws Exception {
        Map<TopicPartition, OffsetSpec> asked = new HashMap<>();
        for (TopicPartition partition : partitions(topic)) asked.put(partition, OffsetSpec.latest());
        Map<Integer, Long> ends = new HashMap<>();
        admin.listOffsets(asked, new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).all().get()
            .forEach((partition, offset) -> ends.put(partition.partition(), offset.offset()));
        return ends;
    }

    private static List<TopicPartition> partitions(String topic) {
        List<TopicPartition> partitions = new ArrayList<>();
        for (int n = 0; n < PARTITIONS; n++) partitions.add(new TopicPartition(topic, n));
        return partitions;
    }

    @Override
    public void read(String topic, Map<Integer, Long> from, Map<Integer, Long> until, Visit visit) {
        List<TopicPartition> partitions = partitions(topic);
        reader.assign(partitions);
        partitions.forEach(partition -> reader.seek(partition, from.getOrDefault(partition.partition(), 0L)));
        while (partitions.stream().anyMatch(each -> reader.position(each) < until.getOrDefault(each.partition(), 0L))) {
            for (ConsumerRecord<byte[], byte[]> record : reader.poll(WAIT)) {
                if (record.offset() >= until.getOrDefault(record.partition(), 0L)) continue;
                visit.message(record.partition(), record.offset(), Figures.number(record.value()));
            }
        }
    }

    @Override
    public AutoCloseable consume(String topic, String group, Handler handle) {
        Consuming consuming = new Consuming(topic, group, handle);
        consuming.start();
        return consuming;
    }

    /** A member of a group, which commits its offsets after each poll. */
    private final class Consuming extends Thread implements AutoCloseable {
        private final String topic, group;
        private final Handler handle;
        private volatile boolean isClosed;

        Consuming(String topic, String group, Handler handle) {
            this.topic = topic;
            this.group = group;
            this.handle = handle;
        }

        @Override
        public void run() {
            try (KafkaConsumer<byte[], byte[]> consumer = consumer(group)) {
                consumer.subscribe(List.of(topic));
                while (!isClosed) {
                    ConsumerRecords<byte[], byte[]> records = consumer.poll(WAIT);
                    for (ConsumerRecord<byte[], byte[]> record : records) handle.message(Figures.number(record.value()));
                    if (!records.isEmpty()) consumer.commitSync();
                }
            }
        }

        @Override
        public void close() throws InterruptedException {
            isClosed = true;
            join();
        }
    }
}
