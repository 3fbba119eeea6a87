package uniffle;

import java.util.LinkedHashMap;
import java.util.Map;

/** What a scenario has to say of its result: a digest to compare, and what was wrong with it in itself. */
final class Outcome {
  final String digest;
  final Map<String, Object> notes = new LinkedHashMap<>();
  String error;

  Outcome(String digest) {
    this.digest = digest;
  }

  /** The first check that does not hold is the error. */
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
