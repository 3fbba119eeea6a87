package uniffle;

import java.util.LinkedHashMap;
import java.util.Map;

/** Outcome of a scenario: a digest to compare, and the error of the scenario's own checks. */
final class Outcome {
  final String digest;
  final Map<String, Object> notes = new LinkedHashMap<>();
  String error;

  Outcome(String digest) {
    this.digest = digest;
  }

  /** Records the first failed check as the error. */
  Outcome check(boolean holds, String otherwise) {
    if (!holds && error == null) {
      error = otherwise;
    }
    return this;
  }

  Outcome note(String name, Object value) {
    notes.put(name, value);
    return this;
  }
}
