package uniffle.driver;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/** Resource usage of a local process since its start. */
final class Process {
  /** {@code USER_HZ}: 100 on every Linux that runs a JVM. */
  private static final double TICKS_PER_SECOND = 100.0;
  private static final long LOOK_MS = 250;
  /** CPU seconds per look below which a process counts as idle. */
  private static final double QUIET_SECONDS = 0.0125;
  private static final int LOOKS_MAX = 120;

  private final Path dir;

  Process(int pid) {
    dir = Path.of("/proc", String.valueOf(pid));
  }

  /** Returns user and system time. */
  double cpuSeconds() throws IOException {
    String stat = Files.readString(dir.resolve("stat"));
    String[] fields = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
    return (Long.parseLong(fields[11]) + Long.parseLong(fields[12])) / TICKS_PER_SECOND;
  }

  /** Waits until the process is idle, because a flush belongs to the write that caused it, and returns its CPU time. */
  double cpuSecondsAtRest() throws IOException, InterruptedException {
    double last = cpuSeconds();
    for (int look = 0; look < LOOKS_MAX; look++) {
      Thread.sleep(LOOK_MS);
      double now = cpuSeconds();
      if (now - last < QUIET_SECONDS) {
        return now;
      }
      last = now;
    }
    return last;
  }

  long peakRssBytes() throws IOException {
    for (String line : Files.readAllLines(dir.resolve("status"))) {
      if (line.startsWith("VmHWM:")) {
        return Long.parseLong(line.replaceAll("[^0-9]", "")) << 10;
      }
    }
    throw new IOException("no VmHWM in " + dir);
  }
}
