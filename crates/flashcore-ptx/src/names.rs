//! The macro that declares an enum and its PTX spelling in one place. Used by types, ops, modifiers and
//! special registers; the parser and the printer both read the spelling from here.

/// Declares an enum whose variants each have one PTX spelling: `text()`, `parse()` and `ALL` come with it.
macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($variant:ident $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum $name {
            $(#[doc = concat!("`", $text, "`")] $variant),*
        }

        impl $name {
            /// Every variant, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// How PTX spells it.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }

            /// Reads the PTX spelling.
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$variant),)* _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.text())
            }
        }
    };
}
pub(crate) use named;
