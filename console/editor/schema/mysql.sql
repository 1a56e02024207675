-- MySQL 5.7, MariaDB 10.2 or later. Who changed what, when and why: a row is written with the change, or neither.
-- ofTable and name say which row; fromRow and toRow are all of its columns before and after, as JSON of texts; NULL: there
-- was none, there is none. undoneBy is the auditId of the change that undid this one. Of a penalty or a reset fromRow is NULL,
-- and toRow is a JSON text that says what was done.
CREATE TABLE IF NOT EXISTS `t_ratelimite_audit` (
  `auditId` BIGINT NOT NULL AUTO_INCREMENT,
  `changedAt` TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  `changedBy` VARCHAR(256) CHARACTER SET utf8mb4 NOT NULL,
  `why` VARCHAR(2000) CHARACTER SET utf8mb4 NOT NULL,
  `ofTable` VARCHAR(129) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `name` VARCHAR(512) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  `fromRow` MEDIUMTEXT CHARACTER SET utf8mb4 NULL,
  `toRow` MEDIUMTEXT CHARACTER SET utf8mb4 NULL,
  `undoneBy` BIGINT NULL,
  PRIMARY KEY (`auditId`),
  KEY `name` (`name`(64))
) ENGINE = InnoDB;
