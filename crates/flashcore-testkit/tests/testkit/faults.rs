//! Single faults of a plain backend: each is named once, and every one must be found.

/// Declares `Fault`, which may be `None`, and the list of all others.
macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Clone, Copy, PartialEq, Debug)]
        enum Fault {
            None,
            $($(#[$doc])* $name,)*
        }

        const FAULTS: &[Fault] = &[$(Fault::$name),*];
    };
}
