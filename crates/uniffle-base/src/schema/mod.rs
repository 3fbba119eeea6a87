//! Declaration of configuration: each module declares its keys once, with [`section!`].
//!
//! A key has a dotted path with aliases, a [`Kind`] (type and bounds), a [`Reload`] behaviour, a
//! default and a text. The default may depend on the [`Machine`] and on the fields above. The macro
//! generates the struct, its `Default`, reading, printing and reloading; the example file and the
//! reference page come from the same declaration. Fields without a key are internal settings.
//! Invariant: no other part of the program knows the type or default of a key. Bounds that its kind
//! cannot express are in `config::check`.

pub mod files;
mod key;
pub mod kind;
pub mod limits;
mod machine;
pub mod names;
pub mod network;
mod reader;
pub mod redact;

pub use key::{Key, Problem, Reload, RemovedKey, Schema};
pub use kind::{Kind, Word};
pub use machine::Machine;
pub use reader::ValueReader;

use toml::Table;
pub use toml::Value;

/// A part of the configuration; implemented by [`section!`].
pub trait Section: Sized {
    /// Adds the keys of this section.
    fn describe(schema: &mut Schema);
    /// Reads the values. Absent and invalid values get the default; invalid ones add a problem.
    fn read(reader: &mut ValueReader, machine: &Machine) -> Self;
    /// Adds every key that has a value and is no secret.
    fn print(&self, printed: &mut Vec<(&'static str, Value)>);
    /// Takes over the values of `new` that may change while the worker runs.
    fn renew(&mut self, new: &Self);
}

/// Converts entries with dotted paths to nested tables.
pub fn nested(entries: Vec<(&'static str, Value)>) -> Table {
    let mut top = Table::new();
    for (path, value) in entries {
        let (tables, leaf) = path.rsplit_once('.').unwrap_or(("", path));
        insert(&mut top, tables, leaf, value);
    }
    top
}

fn insert(table: &mut Table, tables: &str, leaf: &str, value: Value) {
    if tables.is_empty() {
        table.insert(leaf.to_owned(), value);
        return;
    }
    let (first, rest) = tables.split_once('.').unwrap_or((tables, ""));
    if let Value::Table(inner) = table.entry(first).or_insert_with(|| Value::Table(Table::new())) {
        insert(inner, rest, leaf, value);
    }
}

/// Declares a section.
///
/// - `#[table("name", "TEXT")]` above the struct describes a table.
/// - `#[key("dotted.path" or "other.path", KIND, RELOAD, example "TOML", env "VARIABLE")]` makes a
///   field a key. `or`, `example` and `env` are optional. `env` takes several variables: the first
///   that is set counts, and KIND must read text.
/// - `#[env("VARIABLE", KIND)]` makes a field an environment variable.
/// - `#[section(TYPE)]` nests a section.
///
/// A default may use the machine, under the name in the header, and the fields above.
#[macro_export]
macro_rules! section {
    ($(#[$($attribute:tt)*])* pub struct $name:ident { $($fields:tt)* }) => {
        $crate::schema::section! { $(#[$($attribute)*])* pub struct $name |machine| { $($fields)* } }
    };
    (
        $(#[doc = $text:expr])*
        $(#[table($table:literal, $about:expr)])*
        $(#[derive($($derive:ident),*)])?
        pub struct $name:ident |$machine:ident| {
            $(
                $(#[doc = $doc:expr])*
                $(#[key(
                    $path:literal $(or $alias:literal)*, $kind:expr, $reload:ident
                    $(, example $example:literal)? $(, env $($env:literal)+)?
                )])?
                $(#[env($variable:literal, $env_kind:expr)])?
                $(#[section($nested:ty)])?
                pub $field:ident: $ty:ty $(= $default:expr)?,
            )*
        }
    ) => {
        $(#[doc = $text])*
        #[derive(Debug, Clone, PartialEq, $($($derive),*)?)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $ty, )*
        }

        impl $crate::schema::Section for $name {
            fn describe(schema: &mut $crate::schema::Schema) {
                $( schema.tables.push(($table, $about)); )*
                $(
                    let doc: &'static [&'static str] = &[$($doc),*];
                    let _ = doc;
                    $({
                        let kind: $crate::schema::Kind<$ty> = $kind;
                        schema.keys.push($crate::schema::Key {
                            path: $path,
                            aliases: &[$($alias),*],
                            env: &[$($($env),+)?],
                            doc,
                            bounds: kind.bounds().to_owned(),
                            reload: $crate::schema::Reload::$reload,
                            example: [$($example)?].into_iter().next(),
                        });
                    })?
                    $({
                        let kind: $crate::schema::Kind<$ty> = $env_kind;
                        schema.keys.push($crate::schema::Key {
                            path: "",
                            aliases: &[],
                            env: &[$variable],
                            doc,
                            bounds: kind.bounds().to_owned(),
                            reload: $crate::schema::Reload::Restart,
                            example: None,
                        });
                    })?
                    $( <$nested as $crate::schema::Section>::describe(schema); )?
                )*
                let _ = schema;
            }

            fn read(reader: &mut $crate::schema::ValueReader, $machine: &$crate::schema::Machine) -> Self {
                let _ = $machine;
                $(
                    let given: Option<Option<$ty>> = [
                        $( reader.take($path, &[$($($env),+)?], $kind), )?
                        $( reader.variable($variable, $env_kind), )?
                    ].into_iter().next();
                    let _ = &given;
                    $( let $field: $ty = given.flatten().unwrap_or_else(|| $default); )?
                    $( let $field: $ty = <$nested as $crate::schema::Section>::read(reader, $machine); )?
                )*
                Self { $($field),* }
            }

            fn print(&self, printed: &mut Vec<(&'static str, $crate::schema::Value)>) {
                $(
                    $(
                        let kind: $crate::schema::Kind<$ty> = $kind;
                        printed.extend(kind.print(&self.$field).map(|value| ($path, value)));
                    )?
                    $( <$nested as $crate::schema::Section>::print(&self.$field, printed); )?
                )*
                let _ = printed;
            }

            fn renew(&mut self, new: &Self) {
                $(
                    $(
                        if $crate::schema::Reload::$reload != $crate::schema::Reload::Restart {
                            self.$field.clone_from(&new.$field);
                        }
                    )?
                    $( <$nested as $crate::schema::Section>::renew(&mut self.$field, &new.$field); )?
                )*
                let _ = new;
            }
        }

        impl Default for $name {
            fn default() -> Self {
                let mut reader = $crate::schema::ValueReader::default();
                $crate::schema::Section::read(&mut reader, &$crate::schema::Machine::default())
            }
        }
    };
}
pub use section;

/// Declares an enum whose variants are configuration words.
#[macro_export]
macro_rules! words {
    (
        $(#[doc = $text:expr])*
        pub enum $name:ident {
            $( $(#[doc = $doc:expr])* $variant:ident = $word:literal, )*
        }
    ) => {
        $(#[doc = $text])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $( $(#[doc = $doc])* $variant, )*
        }

        impl $name {
            /// Returns the word of this variant.
            pub fn as_str(self) -> &'static str {
                match self {
                    $( Self::$variant => $word, )*
                }
            }
        }

        impl $crate::schema::Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant),*];

            fn as_str(self) -> &'static str {
                Self::as_str(self)
            }
        }
    };
}
pub use words;

#[cfg(test)]
mod tests {
    #![allow(unreachable_pub, reason = "the macros declare for other modules")]

    use super::*;
    use crate::schema::kind::{count, optional, ratio};

    words! {
        /// A colour.
        pub enum Colour {
            /// Red.
            Red = "red",
            /// Blue.
            Blue = "blue",
        }
    }

    section! {
        /// A part.
        #[table("part", "A part for tests.")]
        pub struct Part |machine| {
            /// How wide.
            #[key("part.width" or "width", count(1..=9), AtOnce)]
            pub width: u32 = 3,
            /// How high; as wide as it is by default.
            #[key("part.height", count(1..=9), Restart, example "4")]
            pub height: u32 = width,
            /// Share.
            #[key("part.share", optional(ratio()), NextUse, example "0.5")]
            pub share: Option<f64> = None,
            /// What it looks like.
            #[key("part.colour", kind::word(), Restart, env "COLOUR")]
            pub colour: Colour = Colour::Red,
            /// Not configured.
            pub cores: usize = machine.cores,
        }
    }

    fn read(text: &str, env: &[(&str, &str)]) -> (Part, Vec<String>) {
        let mut schema = Schema::default();
        Part::describe(&mut schema);
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut reader = ValueReader::new(&schema, text.parse().unwrap(), env);
        let part = Part::read(&mut reader, &Machine::default());
        (part, reader.problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn defaults_follow_the_machine_and_the_fields_above() {
        let (part, problems) = read("width = 5", &[]);
        assert_eq!((part.width, part.height, part.cores, problems.len()), (5, 5, 1, 0));
        assert_eq!(Part::default().colour, Colour::Red);
    }

    #[test]
    fn printed_configuration_parses_back() {
        let (part, _) = read("[part]\nheight = 2\ncolour = \"BLUE\"\nshare = 0.25", &[]);
        let mut printed = Vec::new();
        part.print(&mut printed);
        assert_eq!(printed.len(), 4);
        assert_eq!(read(&nested(printed).to_string(), &[]).0, part);
    }

    #[test]
    fn environment_overrides_the_file() {
        let read_with = |colour| read("[part]\ncolour = \"blue\"", &[("COLOUR", colour)]);
        assert_eq!(read_with("red").0.colour, Colour::Red);
        assert_eq!(read_with("x").1, ["COLOUR = x: must be red or blue"]);
        assert_eq!(read_with(" ").0.colour, Colour::Blue);
    }

    #[test]
    fn reload_applies_keys_without_restart() {
        let (mut running, _) = read("", &[]);
        let (new, _) = read("[part]\nwidth = 9\nheight = 9\nshare = 1\ncolour = \"blue\"", &[]);
        running.renew(&new);
        assert_eq!(running, Part { height: 3, colour: Colour::Red, ..new });
    }
}
