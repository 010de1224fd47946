import java.util.HashMap;
import java.util.Map;

/** A line of the driver's input: a name, and `key=value` words. */
final class Command {
    final String name;
    private final Map<String, String> values = new HashMap<>();

    Command(String line) {
        String[] words = line.trim().split(" ");
        name = words[0];
        for (int i = 1; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            values.put(pair[0], pair[1]);
        }
    }

    String text(String key) {
        String value = values.get(key);
        if (value == null) throw new IllegalArgumentException(name + " lacks " + key);
        return value;
    }

    int number(String key) {
        return Integer.parseInt(text(key));
    }

    double real(String key) {
        return Double.parseDouble(text(key));
    }
}
