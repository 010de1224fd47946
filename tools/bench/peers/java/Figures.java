import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Locale;
import java.util.Map;
import java.util.StringJoiner;

/** What the driver prints, and the numbers that messages carry. */
final class Figures {
    static final int BODY = 256;

    private Figures() {}

    static String json(Map<String, ? extends Number> figures) {
        StringJoiner members = new StringJoiner(", ", "{", "}");
        figures.forEach((name, value) -> members.add(
            "\"" + name + "\": " + (value instanceof Double ? String.format(Locale.ROOT, "%.6f", value) : value)));
        return members.toString();
    }

    /** The value below which a share of the sorted nanoseconds lies, in milliseconds; -1 where there is none. */
    static double milliseconds(long[] sorted, double share) {
        return sorted.length == 0 ? -1 : sorted[(int) Math.min(sorted.length - 1, share * sorted.length)] / 1e6;
    }

    static byte[] body(long number) {
        byte[] body = new byte[BODY];
        Arrays.fill(body, (byte) 0xab);
        ByteBuffer.wrap(body).putLong(number);
        return body;
    }

    static long number(byte[] body) {
        return ByteBuffer.wrap(body).getLong();
    }
}
