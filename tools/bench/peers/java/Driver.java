import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.Map;

/**
 * Measures one message system. It reads a command a line from stdin (`paced callers=64 seconds=6`), prints one JSON
 * object for each, and ends with its input: so it outlives neither a failure of its parent nor a kill.
 */
public final class Driver {
    private Driver() {}

    public static void main(String[] words) {
        PrintStream answers = System.out;
        System.setOut(System.err); // a client's library logs to System.out
        int code = 0;
        try {
            answer(words[0], words[1], answers);
        } catch (Exception error) {
            error.printStackTrace();
            code = 1;
        }
        System.exit(code); // without waiting for the clients' own threads
    }

    private static void answer(String name, String address, PrintStream answers) throws Exception {
        Peer peer = (Peer) Class.forName(name).getDeclaredConstructor(String.class).newInstance(address);
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        answers.println(Figures.json(Map.of("ready", 1)));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            answers.println(Figures.json(run(peer, new Command(line))));
        }
    }

    private static Map<String, Number> run(Peer peer, Command command) throws Exception {
        switch (command.name) {
            case "transactions":
            case "paced":
                return new Transactions(peer, command).run();
            case "pile":
                peer.createTopic(command.text("topic"));
                peer.publish(command.text("topic"), command.number("messages"));
                return Map.of();
            case "drain":
                return new Drain(peer, command).run();
            default:
                throw new IllegalArgumentException(command.name);
        }
    }
}
