import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Apache RocketMQ: transaction messages as its client's manual has them. Argument: `nameserver,broker`. */
public final class RocketMq implements Peer {
    private static final int QUEUES = 8, READ = 6, BATCH = 500, MOST = 1024;

    private final String nameServer, broker;
    private final DefaultMQAdminExt admin = new DefaultMQAdminExt();
    private final DefaultMQPullConsumer reader = new DefaultMQPullConsumer("reader");

    public RocketMq(String addresses) throws MQClientException {
        nameServer = addresses.split(",")[0];
        broker = addresses.split(",")[1];
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName("admin");
        admin.start();
        reader.setNamesrvAddr(nameServer);
        reader.setInstanceName("reader");
        reader.start();
    }

    @Override
    public void createTopic(String topic) throws Exception {
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(topic, QUEUES, QUEUES, READ));
        for (int tries = 0; ; tries++) {
            try {
                if (reader.fetchSubscribeMessageQueues(topic).size() == QUEUES) return;
            } catch (MQClientException error) {
                if (tries > 300) throw error;
            }
            Thread.sleep(100); // the pause between two looks whether the name server knows the topic
        }
    }

    @Override
    public Sender sender(String topic, int callers) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(topic + "-producers");
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object commits) {
                ((Runnable) commits).run();
                return LocalTransactionState.COMMIT_MESSAGE;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        start(producer, topic);
        return new Sender() {
            @Override
            public void transaction(byte[] body, Runnable commits) throws Exception {
                SendResult result = producer.sendMessageInTransaction(new Message(topic, body), commits);
                if (result.getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException(result.getSendStatus().toString()); // it is not on the disk
                }
            }

            @Override
            public void close() {
                producer.shutdown();
            }
        };
    }

    private void start(DefaultMQProducer producer, String topic) throws MQClientException {
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(topic);
        producer.setRetryTimesWhenSendFailed(0); // a retry would double a message
        producer.setSendMsgTimeout(10_000);
        producer.start();
    }

    @Override
    public void publish(String topic, int messages) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(topic + "-publisher");
        start(producer, topic + "-publisher");
        for (int first = 0; first < messages; first += BATCH) {
            List<Message> batch = new ArrayList<>();
            for (int n = first; n < Math.min(first + BATCH, messages); n++) batch.add(new Message(topic, Figures.body(n)));
            producer.send(batch);
        }
        producer.shutdown();
    }

    @Override
    public Map<Integer, Long> ends(String topic) throws Exception {
        Map<Integer, Long> ends = new HashMap<>();
        admin.examineTopicStats(topic).getOffsetTable()
            .forEach((queue, offsets) -> ends.put(queue.getQueueId(), offsets.getMaxOffset()));
        return ends;
    }

    @Override
    public void read(String topic, Map<Integer, Long> from, Map<Integer, Long> until, Visit visit) throws Exception {
        for (MessageQueue queue : reader.fetchSubscribeMessageQueues(topic)) {
            int partition = queue.getQueueId();
            long offset = from.getOrDefault(partition, 0L), end = until.getOrDefault(partition, 0L);
            while (offset < end) {
                PullResult result = reader.pull(queue, "*", offset, MOST);
                if (result.getPullStatus() != PullStatus.FOUND) {
                    throw new IllegalStateException(queue + " gave " + result + " at " + offset + " of " + end);
                }
                for (MessageExt message : result.getMsgFoundList()) {
                    if (message.getQueueOffset() >= end) break;
                    visit.message(partition, message.getQueueOffset(), Figures.number(message.getBody()));
                }
                offset = result.getNextBeginOffset();
            }
        }
    }

    @Override
    public AutoCloseable consume(String topic, String group, Handler handle) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(MOST);
        consumer.setConsumeMessageBatchMaxSize(MOST);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) handle.message(Figures.number(message.getBody()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer::shutdown;
    }
}
