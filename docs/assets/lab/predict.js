// Predict, then see.
"use strict";
