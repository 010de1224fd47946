import com.google.gson.Gson;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * A shop without the SDK, in Java 17 or later, with Gson for JSON: half, commit, check, consume.
 *
 * <pre>mvn dependency:copy-dependencies -DoutputDirectory=lib
 * java -cp 'lib/*' Shop.java http://127.0.0.1:7400 DIRECTORY</pre>
 *
 * Its database is a directory. A file is created once, and whole, or not at all: that is the local transaction. In your
 * service it is a transaction of your database that inserts a row with the id of Notify's transaction beside the order.
 */
public final class Shop {
    private static final String GROUP = "shop-java";
    private static final String TOPIC = "order.placed.java";
    private static final String INSTANCE = "java-" + ProcessHandle.current().pid();
    private static final Gson GSON = new Gson();
    private static final SecureRandom CHANCE = new SecureRandom();

    private final HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    private final String url;
    private final Path directory;

    private Shop(String url, Path directory) {
        this.url = url;
        this.directory = directory;
    }

    private enum Failure { NONE, BEFORE_THE_COMMIT, AFTER_THE_COMMIT }

    private JsonObject request(String method, String path, Object body) throws IOException, InterruptedException {
        HttpRequest asked = HttpRequest.newBuilder(URI.create(url + path))
            .header("content-type", "application/json")
            .method(method, HttpRequest.BodyPublishers.ofString(GSON.toJson(body)))
            .build();
        HttpResponse<String> found = http.send(asked, HttpResponse.BodyHandlers.ofString());
        if (found.statusCode() >= 300) {
            throw new IOException(method + " " + path + ": " + found.statusCode() + " " + found.body());
        }
        return JsonParser.parseString(found.body()).getAsJsonObject();
    }

    /** A UUID of version 7: milliseconds, then chance. */
    private static String newId() {
        long first = System.currentTimeMillis() << 16 | 0x7000 | CHANCE.nextInt(0x1000);
        long second = CHANCE.nextLong() >>> 2 | 0x8000_0000_0000_0000L;
        return new UUID(first, second).toString();
    }

    /** The transaction: write a row once. Returns what is there: this text, or that of whoever came first. */
    private String insert(String table, String name, String text) throws IOException {
        Path path = directory.resolve(table).resolve(name);
        Files.createDirectories(path.getParent());
        Path draft = Files.createTempFile(path.getParent(), name, "");
        try (FileChannel file = FileChannel.open(draft, StandardOpenOption.WRITE)) {
            file.write(ByteBuffer.wrap(text.getBytes(StandardCharsets.UTF_8)));
            file.force(true);
        }
        try {
            Files.createLink(path, draft);
            return text;
        } catch (FileAlreadyExistsException known) {
            return Files.readString(path);
        }
    }

    /** Place an order. With a failure the process dies before its commit, or before it can tell the outcome. */
    private void place(String item, Failure failure) throws IOException, InterruptedException {
        String id = newId();
        Map<String, Object> message = Map.of("topic", TOPIC, "key", item, "body", GSON.toJson(Map.of("item", item)));
        Map<String, Object> half = Map.of("id", id, "check_after", 0.5, "messages", List.of(message));
        JsonObject stored = request("POST", "/v1/transactions",
            Map.of("producer_group", GROUP, "transactions", List.of(half)));
        JsonObject first = stored.getAsJsonArray("items").get(0).getAsJsonObject();
        if (first.get("status").getAsInt() != 201) {
            throw new IOException("the half was refused: " + first); // roll back, and say so
        }
        if (failure == Failure.BEFORE_THE_COMMIT) {
            return;
        }
        if (!insert("transactions", id, "COMMIT").equals("COMMIT")) {
            throw new IOException("order " + item + " was rolled back by a check: it took too long");
        }
        if (failure == Failure.AFTER_THE_COMMIT) {
            return;
        }
        try {
            tell(List.of(Map.of("id", id, "outcome", "COMMIT")));
        } catch (IOException error) {
            System.err.println(error.getMessage() + ": the server will ask");
        }
    }

    private void tell(List<Map<String, String>> outcomes) throws IOException, InterruptedException {
        request("POST", "/v1/transactions/outcomes", Map.of("producer_group", GROUP, "outcomes", outcomes));
    }

    /** Answer checks until it is over. A row that is missing is written, so that its transaction cannot commit. */
    private void answerChecks(AtomicBoolean isOver) throws IOException, InterruptedException {
        while (!isOver.get()) {
            JsonObject asked = request("POST", "/v1/checks/poll",
                Map.of("producer_group", GROUP, "instance", INSTANCE, "wait", 1, "max", 100));
            List<Map<String, String>> outcomes = new ArrayList<>();
            for (JsonElement element : asked.getAsJsonArray("checks")) {
                JsonObject check = element.getAsJsonObject();
                String id = check.get("id").getAsString();
                String outcome = insert("transactions", id, "ROLLBACK");
                outcomes.add(Map.of("id", id, "check", check.get("token").getAsString(), "outcome", outcome));
            }
            if (!outcomes.isEmpty()) {
                tell(outcomes);
            }
        }
    }

    /** Handle so many messages, each id once. */
    private void consume(int count) throws IOException, InterruptedException {
        String path = "/v1/groups/points-java";
        request("PUT", path + "/subscriptions/" + TOPIC, Map.of("start", "earliest"));
        int handled = 0;
        while (handled < count) {
            JsonObject found = request("POST", path + "/receive",
                Map.of("instance", INSTANCE, "max", 10, "wait", 5, "lease", 30));
            List<Map<String, String>> items = new ArrayList<>();
            for (JsonElement element : found.getAsJsonArray("messages")) {
                JsonObject message = element.getAsJsonObject();
                String mine = UUID.randomUUID().toString();
                if (insert("points", message.get("id").getAsString(), mine).equals(mine)) { // else it took effect before
                    JsonObject order = JsonParser.parseString(message.get("body").getAsString()).getAsJsonObject();
                    System.out.println("points for " + order.get("item").getAsString());
                    handled++;
                }
                items.add(Map.of("receipt", message.get("receipt").getAsString(), "action", "ack"));
            }
            if (!items.isEmpty()) {
                request("POST", path + "/settle", Map.of("items", items));
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        Shop shop = new Shop(arguments[0], Path.of(arguments[1]));
        AtomicBoolean isOver = new AtomicBoolean();
        CompletableFuture<Void> checks = CompletableFuture.runAsync(() -> {
            try {
                shop.answerChecks(isOver);
            } catch (IOException | InterruptedException error) {
                throw new IllegalStateException(error);
            }
        });
        shop.place("book", Failure.NONE);
        shop.place("lamp", Failure.AFTER_THE_COMMIT);
        shop.place("ghost", Failure.BEFORE_THE_COMMIT);
        shop.consume(2);
        isOver.set(true);
        checks.join();
    }
}
