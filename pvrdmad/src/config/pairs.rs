//! Keys in the syntax of the command line: `key=value,key=value`.

use std::fmt;

use serde::de::value::{MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::keys::{Keys, similar};

/// Syntax of pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Syntax {
    /// Character between two pairs.
    pub(super) separator: char,
    /// Character between a key and its value.
    pub(super) assign: char,
    /// Owner of the keys, for messages.
    pub(super) of: &'static str,
}

/// Parses a struct of keys. Values cannot contain separators; a path that contains one can only be configured in the
/// file.
///
/// # Errors
/// A key is unknown or given twice, or its value is invalid.
pub(super) fn from_pairs<T: Keys + DeserializeOwned>(text: &str, syntax: Syntax) -> Result<T, String> {
    let known = || T::KEYS.iter().filter(|key| !key.file_only);
    let names = || known().map(|key| key.name).collect::<Vec<_>>().join(", ");
    let mut pairs: Vec<(&str, Vec<&str>)> = Vec::new();
    for part in text.split(syntax.separator) {
        let (key, value) = part.split_once(syntax.assign).unwrap_or((part, ""));
        let value = match known().find(|known| known.name == key) {
            Some(switch) if switch.value == SWITCH && part == key => "on",
            Some(_) if !value.is_empty() => value,
            None if !key.is_empty() && key != part => {
                let hint = similar(key, known().map(|key| key.name));
                let hint = hint.map_or_else(String::new, |name| format!("; did you mean '{name}'?"));
                return Err(format!("unknown key '{key}'{hint} (the keys of {} are {})", syntax.of, names()));
            }
            _ => {
                let assign = syntax.assign;
                return Err(format!("'{part}': expected KEY{assign}VALUE (the keys of {} are {})", syntax.of, names()));
            }
        };
        match pairs.iter_mut().find(|(seen, _)| *seen == key) {
            Some((_, values)) => values.push(value),
            None => pairs.push((key, vec![value])),
        }
    }
    let pairs = pairs.iter().map(|(key, values)| (*key, Value { key, values }));
    T::deserialize(MapDeserializer::new(pairs)).map_err(|error| match error {
        PairsError::Missing(name) => {
            let value = known().find(|key| key.name == name).map_or("...", |key| key.value);
            format!("{} needs a {name} ({name}={value})", syntax.of)
        }
        wrong => wrong.to_string(),
    })
}

/// Form of a key that may be given without a value.
pub(super) const SWITCH: &str = "on|off";

/// Reason why pairs are refused.
#[derive(Debug)]
enum PairsError {
    /// A required key is missing.
    Missing(&'static str),
    /// A key was repeated.
    Twice(String),
    /// Description of any other problem.
    Wrong(String),
}

impl fmt::Display for PairsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(name) => f.write_str(name),
            Self::Twice(key) => write!(f, "'{key}' is given twice"),
            Self::Wrong(problem) => f.write_str(problem),
        }
    }
}

impl std::error::Error for PairsError {}

impl serde::de::Error for PairsError {
    fn custom<T: fmt::Display>(problem: T) -> Self {
        Self::Wrong(problem.to_string())
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::Wrong(format!("'{variant}' is not one of {}", expected.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::Missing(field)
    }
}

/// Values that were given for a key.
#[derive(Clone, Copy)]
struct Value<'a> {
    key: &'a str,
    /// Never empty.
    values: &'a [&'a str],
}

impl<'a> Value<'a> {
    fn single(self) -> Result<&'a str, PairsError> {
        match self.values {
            [value] => Ok(value),
            _ => Err(PairsError::Twice(self.key.to_owned())),
        }
    }

    /// Puts the key in front of an error about its value.
    fn named<T>(self, result: Result<T, PairsError>) -> Result<T, PairsError> {
        result.map_err(|problem| match problem {
            PairsError::Wrong(problem) => PairsError::Wrong(format!("{}: {problem}", self.key)),
            twice => twice,
        })
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, PairsError> {
            let value = self.single()?;
            let wrong = |_| PairsError::Wrong(format!("'{value}' is not a number from 0 to {}", <$type>::MAX));
            visitor.$visit(value.parse().map_err(wrong)?)
        }
    )*};
}

impl<'de> Deserializer<'de> for Value<'de> {
    type Error = PairsError;

    numbers! {
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, PairsError> {
        let value = self.single()?;
        visitor.visit_borrowed_str(value)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, PairsError> {
        self.named(visitor.visit_some(self))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, PairsError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, PairsError> {
        let values = self.values.iter().map(|value| -> StrDeserializer<'de, PairsError> { value.into_deserializer() });
        self.named(visitor.visit_seq(SeqDeserializer::new(values)))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, PairsError> {
        let value: StrDeserializer<'de, PairsError> = self.single()?.into_deserializer();
        visitor.visit_enum(value)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple tuple_struct map
        struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, PairsError> for Value<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}
