import java.util.BitSet;

/** Which numbers were seen, and how many of them more than once. Safe for threads. */
final class Seen {
    private final BitSet numbers = new BitSet();
    private long all;

    synchronized void add(long number) {
        numbers.set(Math.toIntExact(number));
        all++;
    }

    synchronized boolean has(long number) {
        return numbers.get(Math.toIntExact(number));
    }

    synchronized long all() {
        return all;
    }

    synchronized long different() {
        return numbers.cardinality();
    }

    long doubled() {
        return all() - different();
    }
}
