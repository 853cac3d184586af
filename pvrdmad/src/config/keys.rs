//! Definition of configuration keys. Each key is defined once, with its type. The syntax of the file and the command
//! line, `--help`, and the reference page are generated from the definition.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

/// Documentation of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    /// Its name.
    pub(crate) name: &'static str,
    /// Form of its value.
    pub(crate) value: &'static str,
    /// The default, `required`, or empty.
    pub(crate) default: &'static str,
    /// Description. The first line fits into `--help`; further lines are for the reference page.
    pub(crate) doc: &'static [&'static str],
    /// The key is accepted only in the file.
    pub(crate) file_only: bool,
}

impl Key {
    /// Returns the line for `--help`.
    pub(crate) fn summary(&self) -> &'static str {
        self.doc.first().map_or("", |line| line.trim())
    }

    /// Returns the default in brackets, or an empty string.
    pub(crate) fn note(&self) -> String {
        match self.default {
            "" => String::new(),
            "required" => " [required]".to_owned(),
            default => format!(" [default: {default}]"),
        }
    }
}

/// A struct whose fields are keys.
pub(crate) trait Keys {
    /// The keys, in the order of the fields.
    const KEYS: &'static [Key];

    /// Replaces the values that `other` contains.
    fn override_with(&mut self, other: Self);
}

/// A value that another one may replace.
pub(crate) trait Overlay {
    /// Takes the value of `over`, if that is given.
    fn overlay(&mut self, over: Self);
}

impl<T> Overlay for Option<T> {
    fn overlay(&mut self, over: Self) {
        if over.is_some() {
            *self = over;
        }
    }
}

impl<T> Overlay for Vec<T> {
    fn overlay(&mut self, over: Self) {
        if !over.is_empty() {
            *self = over;
        }
    }
}

impl Overlay for PathBuf {
    fn overlay(&mut self, over: Self) {
        if !over.as_os_str().is_empty() {
            *self = over;
        }
    }
}

impl Overlay for String {
    fn overlay(&mut self, over: Self) {
        if !over.is_empty() {
            *self = over;
        }
    }
}

/// Defines a struct of keys: `["name", "VALUE", "default"] field: Type,`, where the default may be `required` or empty.
/// The struct is deserialized by serde, from TOML and from `key=value` pairs (see [`super::pairs`]).
macro_rules! keys {
    (
        $(#[doc = $about:literal])+
        $visibility:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                [$key:literal, $value:literal, $default:literal $(, $file:ident)?]
                $(#[$attribute:meta])*
                $field:ident: $type:ty,
            )*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, PartialEq, Eq, Debug, Default, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        $visibility struct $name {
            $(
                $(#[doc = $doc])+
                $(#[$attribute])*
                #[serde(rename = $key)]
                $visibility $field: $type,
            )*
        }

        impl $crate::config::keys::Keys for $name {
            const KEYS: &'static [$crate::config::keys::Key] = &[$(
                $crate::config::keys::Key {
                    name: $key,
                    value: $value,
                    default: $default,
                    doc: &[$($doc),+],
                    file_only: !stringify!($($file)?).is_empty(),
                },
            )*];

            fn override_with(&mut self, other: Self) {
                $($crate::config::keys::Overlay::overlay(&mut self.$field, other.$field);)*
            }
        }
    };
}

/// Implements deserialization from a string by [`std::str::FromStr`].
macro_rules! deserialize_from_str {
    ($type:ty) => {
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(super) use {deserialize_from_str, keys};

/// Deserializes a value that users write as a word but that processes exchange in its own form.
pub(super) fn word<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    struct Word<T>(T);

    impl<'de, T: FromStr<Err = String>> Deserialize<'de> for Word<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            String::deserialize(deserializer)?.parse().map(Self).map_err(de::Error::custom)
        }
    }

    Ok(Option::deserialize(deserializer)?.map(|Word(value)| value))
}

/// Returns the known word that was probably meant, if one is similar enough.
pub(super) fn similar<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.into_iter().map(|candidate| (strsim::jaro_winkler(word, candidate), candidate));
    let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (best.0 > 0.8).then_some(best.1)
}
