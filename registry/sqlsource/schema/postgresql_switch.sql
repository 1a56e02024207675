-- PostgreSQL 14 or later. Switches of limiting for a whole fleet; a missing row means on.
CREATE TABLE IF NOT EXISTS "t_ratelimite_switch" (
  "name" varchar(64) NOT NULL,
  "enabled" smallint DEFAULT 1 NOT NULL,
  PRIMARY KEY ("name")
);
